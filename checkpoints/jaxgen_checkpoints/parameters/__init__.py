"""The parameters that families share. Each says the final layout of one weight, [out, in]."""
