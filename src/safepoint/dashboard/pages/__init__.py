"""The pages, each with its JSON document under the same address."""
