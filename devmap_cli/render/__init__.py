"""The only place that knows Rich: nouns in, renderables out."""
