from farsight.analysis.graft_sweep.graft_sweep import main

if __name__ == "__main__":
    main()
