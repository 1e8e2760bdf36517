"""robustrl"""
