"""peagle doctor: what this machine has, what runs on it, and why nothing better does."""

from peagle.doctor.report import DoctorReport, examine

__all__ = ["DoctorReport", "examine"]
