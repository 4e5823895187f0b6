"""The command `prep`: data sets as rows of the parquet schema, measured and checked for contamination."""
