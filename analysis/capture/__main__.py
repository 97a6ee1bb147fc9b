from farsight.analysis.capture.capture import main

if __name__ == "__main__":
    main()
