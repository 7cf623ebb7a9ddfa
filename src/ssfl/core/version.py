"""The version number of the package."""

VERSION = "0.2.0"
