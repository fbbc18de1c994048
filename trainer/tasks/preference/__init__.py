"""Answers of which people preferred some: DPO and its kin, and reward models."""
