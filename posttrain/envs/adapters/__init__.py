"""Environments of other packages, one file a package."""
