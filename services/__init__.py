"""The three processes of a deployment, one package each."""
