"""The load generator: `locust -f loadgen`. Locust runs every module of this folder that has no leading underscore: `locustfile` alone."""
