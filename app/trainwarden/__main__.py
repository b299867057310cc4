"""`python -m trainwarden` is the `trainwarden` command."""

from trainwarden.app.cli import main

if __name__ == "__main__":
    main()
