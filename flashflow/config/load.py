"""placeholder for the loader"""
from flashflow.config.sections import Config
def load_config(path, overrides=()): raise NotImplementedError
def dump_config(config): raise NotImplementedError
