"""Does it really run there: load with the map, generate, measure, report."""
