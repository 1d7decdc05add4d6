"""What commands and pages say about jobs: JSON documents and sentences. This package changes nothing."""
