"""Tests of the lab alone: does each fault have the mechanism that it claims?"""
