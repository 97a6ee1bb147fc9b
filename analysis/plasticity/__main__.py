from farsight.analysis.plasticity.plasticity import main

if __name__ == "__main__":
    main()
