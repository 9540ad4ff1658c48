"""What a recommender asks of people's data, as queries, and what is made of the answers. numpy only."""
