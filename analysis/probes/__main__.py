from farsight.analysis.probes.probes import main

if __name__ == "__main__":
    main()
