from farsight.analysis.geometry.geometry import main

if __name__ == "__main__":
    main()
