"""Who may use the dashboard, and for what: links, cookies, roles, proxies, forged requests."""
