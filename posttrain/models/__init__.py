"""Models that posttrain can make by itself."""
