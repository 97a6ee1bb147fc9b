from farsight.launch.plan.plan import main

if __name__ == "__main__":
    main()
