"""What each key of verl means in this configuration: one table of rules, read by `import-verl` and by error hints."""
