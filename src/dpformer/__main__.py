from dpformer.cli import main

main()
