"""The first process of a pod, which starts and watches all others."""
