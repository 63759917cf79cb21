"""The store: SQLAlchemy models and queries, one noun a module. Only the API process writes it."""
