from farsight.analysis.layers.layers import main

if __name__ == "__main__":
    main()
