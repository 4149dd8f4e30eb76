"""Lets an editable installation have its data files, JupyterLab's settings: setuptools asks for `has_data` there."""

from setuptools import Distribution, setup


class WithData(Distribution):
    has_data = Distribution.has_data_files


setup(distclass=WithData)
