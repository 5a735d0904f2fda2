"""The status page: one JSON document about the fleet, and the HTML, CSS and script that show it."""
