from farsight.evals.harness.harness import main

if __name__ == "__main__":
    main()
