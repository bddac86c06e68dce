"""The config: `sections` says what there is, `rules` what contradicts, `load` reads it and reports every mistake."""

from flashflow.config.load import dump_config, load_config, stored_config
from flashflow.config.sections import Config

__all__ = ["Config", "dump_config", "load_config", "stored_config"]
