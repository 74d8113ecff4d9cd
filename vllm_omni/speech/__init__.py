"""What talkers and vocoders share: code predictors, causal codec decoders that keep a state for each stream, and
voices that are cloned. Needs torch only.
"""
