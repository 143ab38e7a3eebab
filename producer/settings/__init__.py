"""The settings of gateways and jobs; shared/settings/common.py has those of all processes."""
