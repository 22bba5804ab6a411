"""What every process shares: types, configuration, errors, telemetry."""
