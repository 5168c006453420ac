"""The dashboards as code: ``python -m deploy.monitoring.dashboards NAME`` prints one, ``make generate`` writes all."""
