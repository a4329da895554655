"""Where each tensor is in which file: mapped files, elements, dtypes."""
