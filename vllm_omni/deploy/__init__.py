"""Where stages run, and the bundled deployment of each model type (``configs/``)."""
