"""The model, its optimizer and its loss, laid over ranks: layers over tp, stages over pp."""
