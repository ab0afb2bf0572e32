def run_page(report, subject):
    return ""
