"""The tests, a package only so that the browser's can be one."""
