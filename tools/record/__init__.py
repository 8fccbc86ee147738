"""Scripts that measure what `assets/results` records. Each writes its machine, its versions and its commit."""
