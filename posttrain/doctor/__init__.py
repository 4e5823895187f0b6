"""What `posttrain doctor` looks at: installed software, the machine, what has to start on it."""
