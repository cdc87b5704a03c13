"""The BM25 index over the pooled passages and its queries."""
