"""HTTP server with OpenAI's interface, its replicas, and the application for Ray Serve."""
