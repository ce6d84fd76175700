"""Pages of one file: what a plan holds as tables of data, and the templates (`templates/report/`) that show them.

* `packed_rows`: rows as columns, with every text stored once
* `facts`: what is said of a program more than once
* `eviction_estimates`: what it would save and cost not to keep a value between two uses
* `larger_budget`: what a larger budget would buy
* `program_data`: operations, launches and the bytes of the arena of one program
* `plan_data`: everything that the page of a plan shows
* `answer`: a question, its answer and lines below it
* `time_words`: in sentences, what takes the time
* `answers`: in sentences, what one asks of a plan first
* `render`: data and templates to a page
* `head`: title and figures
* `plan_page`: the page of a plan
* `diff_words`: in sentences, what differs between two plans and why
* `diff_page`: the page of two plans
* `recorded`: results of other commands that a page shows beside the plan
* `notebook`: a few figures and a picture, for notebooks
"""
