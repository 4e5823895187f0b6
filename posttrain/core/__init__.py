"""What every package needs and none is about: data types, errors, registries, plugins, atomic files, HTTP."""
