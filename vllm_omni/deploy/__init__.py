"""The bundled deployment of each model type (``configs/``)."""
