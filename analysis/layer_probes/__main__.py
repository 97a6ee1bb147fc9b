from farsight.analysis.layer_probes.layer_probes import main

if __name__ == "__main__":
    main()
