"""S3 requests that do not go through obstore: listings, ranged reads, and multipart uploads that can be continued."""
