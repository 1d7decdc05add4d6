"""S3 requests that obstore does not offer: multipart uploads that continue after a cut, and ranged reads."""
