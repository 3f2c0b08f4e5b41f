"""The modules that families are composed from; a family imports these and never another family."""
