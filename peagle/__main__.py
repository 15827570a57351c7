from peagle.cli.program import main

main()
