"""EXAONE 4 and the text part of EXAONE 4.5: norms behind each part, layers that do not rotate."""
