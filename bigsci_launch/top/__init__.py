"""All jobs of a user as the rows of one screen: which there are, what each does, and which rows are shown."""
